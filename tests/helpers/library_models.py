"""Small models with the block classes of torchvision and transformers. Functions return a model and its inputs."""
import torch

VIT = dict(
    image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
DINO = {key: value for key, value in VIT.items() if key != "intermediate_size"}
CNN = dict(embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 2, 1, 1])
SWIN = dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)


def torchvision(build, size=32, frames=None):
    def make():
        from torchvision import models

        torch.manual_seed(0)
        return build(models), (torch.randn(*((2, 3, frames) if frames else (2, 3)), size, size),)
    return make


TORCHVISION = {
    "vit": torchvision(lambda m: m.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10)),
    "swin": torchvision(lambda m: m.SwinTransformer(
        patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=10)),
    "swin_v2": torchvision(lambda m: m.SwinTransformer(
        patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=10,
        block=m.swin_transformer.SwinTransformerBlockV2, downsample_layer=m.swin_transformer.PatchMergingV2)),
    "maxvit": torchvision(lambda m: m.MaxVit(
        input_size=(32, 32), stem_channels=16, partition_size=4, block_channels=[16, 32], block_layers=[2, 1],
        head_dim=8, stochastic_depth_prob=0.1, num_classes=10)),
    "resnet18": torchvision(lambda m: m.resnet18(num_classes=10)),
    "resnet50": torchvision(lambda m: m.ResNet(m.resnet.Bottleneck, [1, 2, 1, 1], num_classes=10)),
    "regnet_y_400mf": torchvision(lambda m: m.regnet_y_400mf(num_classes=10)),
    "convnext": torchvision(lambda m: m.ConvNeXt(
        [m.convnext.CNBlockConfig(16, 32, 1), m.convnext.CNBlockConfig(32, None, 1)], layer_scale=0.5, num_classes=10)),
    "efficientnet_b0": torchvision(lambda m: m.efficientnet_b0(num_classes=10), 64),
    "efficientnet_v2_s": torchvision(lambda m: m.efficientnet_v2_s(num_classes=10), 64),
    "mobilenet_v2": torchvision(lambda m: m.mobilenet_v2(num_classes=10, width_mult=0.25), 64),
    "mobilenet_v3_small": torchvision(lambda m: m.mobilenet_v3_small(num_classes=10), 64),
    "mnasnet0_5": torchvision(lambda m: m.mnasnet0_5(num_classes=10), 64),
    "r3d": torchvision(lambda m: m.video.resnet.VideoResNet(
        m.video.resnet.BasicBlock, [m.video.resnet.Conv3DSimple] * 4, [1, 1, 1, 1], m.video.resnet.BasicStem,
        num_classes=10), frames=4),
    "r3d_bottleneck": torchvision(lambda m: m.video.resnet.VideoResNet(
        m.video.resnet.Bottleneck, [m.video.resnet.Conv3DSimple] * 4, [2, 1, 1, 1], m.video.resnet.BasicStem,
        num_classes=10), frames=4),
    "mvit": torchvision(lambda m: m.video.mvit.MViT(
        spatial_size=(32, 32), temporal_size=4, num_classes=10, residual_pool=True, residual_with_cls_embed=False,
        rel_pos_embed=True, proj_after_attn=True, block_setting=[
            m.video.mvit.MSBlockConfig(1, 16, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
            m.video.mvit.MSBlockConfig(2, 16, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
        ]), frames=4),
}


def transformers(name, size=32, head="ForImageClassification", config=None, inputs=None, **arguments):
    """Return a function that returns a model and a tuple of its inputs.

    The inputs are ``inputs()``, by default two random images of this size. ``name`` is the prefix of the model's
    classes: ViT for ViTConfig.
    """
    def make():
        import transformers

        torch.manual_seed(0)
        settings = getattr(transformers, f"{name}Config")(**(config or arguments))
        settings.num_labels = 10
        return getattr(transformers, name + head)(settings), inputs() if inputs else (torch.randn(2, 3, size, size),)
    return make


TRANSFORMERS = {
    "vit": transformers("ViT", **VIT),
    "deit": transformers("DeiT", **VIT),
    "beit": transformers("Beit", **VIT, layer_scale_init_value=0.5, use_relative_position_bias=True),
    "dinov2": transformers("Dinov2", **DINO),
    "dinov2_with_registers": transformers("Dinov2WithRegisters", **DINO),
    "dinov3_vit": transformers("DINOv3ViT", head="Model", **VIT),
    "vit_msn": transformers("ViTMSN", **VIT),
    "yolos": transformers(
        "Yolos", head="ForObjectDetection", **{**VIT, "image_size": [32, 32]}, num_detection_tokens=4),
    "ast": transformers(
        "AST", head="ForAudioClassification", inputs=lambda: (torch.randn(2, 32, 16),), **VIT, max_length=32,
        num_mel_bins=16, frequency_stride=8, time_stride=8),
    "vit_mae": transformers("ViTMAE", head="Model", **VIT),
    "videomae": transformers(
        "VideoMAE", head="ForVideoClassification", inputs=lambda: (torch.randn(2, 4, 3, 32, 32),), **VIT, num_frames=4),
    "ijepa": transformers("IJepa", **VIT),
    "data2vec": transformers("Data2VecVision", **VIT, layer_scale_init_value=0.5),
    "clip": transformers("CLIP", config=dict(vision_config=VIT)),
    "metaclip_2": transformers("MetaClip2", config=dict(vision_config=VIT)),
    "siglip": transformers("Siglip", config=dict(vision_config=VIT)),
    "siglip2": transformers(  # patches, mask of padding, and numbers of rows and columns
        "Siglip2Vision", head="Model", inputs=lambda: (
            torch.randn(2, 8, 12), (torch.arange(8) < torch.tensor([[8], [6]])).int(), torch.tensor([[2, 4], [2, 3]])),
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_patches=16, patch_size=2),
    "perceiver": transformers(
        "Perceiver", 16, head="ForImageClassificationLearned", image_size=16, num_latents=4, d_latents=32,
        num_self_attends_per_block=2, num_self_attention_heads=2, num_cross_attention_heads=2),
    "segformer": transformers(
        "Segformer", 64, num_encoder_blocks=2, depths=[1, 2], sr_ratios=[2, 1], hidden_sizes=[16, 32],
        patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2]),
    "swin": transformers("Swin", **SWIN),
    "swinv2": transformers("Swinv2", **SWIN),
    "donut": transformers("DonutSwin", **SWIN),
    "hiera": transformers(
        "Hiera", image_size=[32, 32], patch_size=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3], embed_dim=16,
        depths=[1, 2], num_heads=[1, 2], masked_unit_size=[4, 4], masked_unit_attention=[True, False],
        query_stride=[2, 2], num_query_pool=1),
    "pvt": transformers(
        "Pvt", image_size=32, num_encoder_blocks=2, depths=[1, 2], sequence_reduction_ratios=[2, 1],
        hidden_sizes=[16, 32], patch_sizes=[4, 2], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2]),
    "pvt_v2": transformers(
        "PvtV2", 64, image_size=64, num_encoder_blocks=2, depths=[1, 2], sr_ratios=[2, 1], hidden_sizes=[16, 32],
        patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2]),
    "focalnet": transformers(
        "FocalNet", image_size=32, patch_size=2, embed_dim=16, hidden_sizes=[16, 32], depths=[1, 2],
        focal_levels=[2, 2], focal_windows=[3, 3]),
    "levit": transformers(
        "Levit", 64, image_size=64, hidden_sizes=[32, 48], num_attention_heads=[2, 3], depths=[2, 2], key_dim=[8, 8],
        mlp_ratio=[2, 2], attention_ratio=[2, 2], down_ops=[["Subsample", 8, 4, 4, 2, 2], [""]]),
    "cvt": transformers(
        "Cvt", 64, patch_sizes=[7, 3], patch_stride=[4, 2], patch_padding=[2, 1], embed_dim=[16, 32], num_heads=[1, 2],
        depth=[1, 2], mlp_ratio=[2.0, 2.0], attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0],
        drop_path_rate=[0.0, 0.1], qkv_bias=[True, True], cls_token=[False, True],
        qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1], stride_kv=[2, 2],
        padding_q=[1, 1], stride_q=[1, 1]),
    "mobilevit": transformers(
        "MobileViT", 64, image_size=64, hidden_sizes=[16, 16, 24], neck_hidden_sizes=[8, 8, 16, 16, 16, 24, 32],
        num_attention_heads=2),
    "mobilevitv2": transformers("MobileViTV2", 64, image_size=64, width_multiplier=0.25, n_attn_blocks=[1, 1, 1]),
    "poolformer": transformers("PoolFormer", hidden_sizes=[8, 16, 16, 32], depths=[1, 2, 1, 1],
                               layer_scale_init_value=0.5),
    "swiftformer": transformers(
        "SwiftFormer", 64, image_size=64, depths=[1, 1, 1, 2], embed_dims=[16, 16, 32, 32]),
    "resnet_basic": transformers("ResNet", layer_type="basic", **CNN),
    "resnet_bottleneck": transformers("ResNet", layer_type="bottleneck", **CNN),
    "regnet_y": transformers("RegNet", layer_type="y", groups_width=4, **CNN),
    "regnet_x": transformers("RegNet", layer_type="x", groups_width=4, **CNN),
    "bit": transformers("Bit", layer_type="preactivation", num_groups=4, **CNN),
    "bit_bottleneck": transformers("Bit", layer_type="bottleneck", num_groups=4, **CNN),
    "convnext": transformers("ConvNext", hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, layer_scale_init_value=0.5),
    "convnextv2": transformers("ConvNextV2", hidden_sizes=[8, 16], depths=[1, 2], num_stages=2),
    "dinov3_convnext": transformers("DINOv3ConvNext", head="Model", hidden_sizes=[8, 16, 16, 16], depths=[1, 2, 1, 1]),
    "efficientnet": transformers(
        "EfficientNet", 64, image_size=64, width_coefficient=0.25, depth_coefficient=0.5, hidden_dim=320),
    "mobilenet_v2": transformers("MobileNetV2", 64, image_size=64, depth_multiplier=0.25),
    "hgnet_v2": transformers(
        "HGNetV2", stem_channels=[3, 8, 8], stage_in_channels=[8, 16, 16, 32], stage_mid_channels=[8, 8, 8, 8],
        stage_out_channels=[16, 16, 32, 32], stage_num_blocks=[1, 2, 1, 1],
        stage_downsample=[False, True, True, True], stage_light_block=[False, False, True, True],
        stage_kernel_size=[3, 3, 5, 5], stage_numb_of_layers=[2, 2, 2, 2], hidden_sizes=[16, 16, 32, 32],
        depths=[1, 2, 1, 1]),
    "blip": transformers(  # images, and tokens of captions
        "Blip", head="ForConditionalGeneration", config=dict(vision_config=VIT, text_config=dict(
            vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=16, bos_token_id=1)),
        inputs=lambda: (torch.randn(2, 3, 32, 32), torch.randint(3, 48, (2, 9)))),
}
MODELS = {
    **{f"torchvision {name}": make for name, make in TORCHVISION.items()},
    **{f"transformers {name}": make for name, make in TRANSFORMERS.items()},
}
