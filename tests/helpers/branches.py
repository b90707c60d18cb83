"""Check with autograd's graph that the `stream` of a block in the tables of blocks is not its branch output."""
import torch

from timm_ortho import sites


def branches(model):
    """Return a dict from each site's name to the names of its branch's parameters.

    The next forward pass with gradients fills the dict. A parameter belongs to the branch if the branch output depends
    on it and the stream does not. The pass fails if the stream of a site depends on the branch output.
    """
    parameters_of = {}
    for site in sites(model):
        parameters = dict(model.get_submodule(site.name.rpartition(".")[0]).named_parameters())

        def hook(connection, inputs, name=site.name, parameters=parameters):
            (x, f), tensors = inputs[:2], [*parameters.values()]
            assert not any(depends(x, [f])), f"{name}: the stream depends on the branch output; correct `stream`"
            of_x, of_f = depends(x, tensors), depends(f, tensors)
            parameters_of[name] = [key for key, x, f in zip(parameters, of_x, of_f, strict=True) if f and not x]
        site.connection.register_forward_pre_hook(hook)
    return parameters_of


def depends(y, inputs):
    """Return for each input whether y depends on it. All inputs require gradients."""
    if not y.requires_grad:
        return [False] * len(inputs)
    gradients = torch.autograd.grad(y.sum(), inputs, retain_graph=True, allow_unused=True)
    return [gradient is not None for gradient in gradients]
