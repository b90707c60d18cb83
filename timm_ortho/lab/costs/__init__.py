"""Parameters, FLOPs and throughput of models; nothing is trained (`timm-ortho cost`).

`measure` counts FLOPs and parameters and times the models. `tables` puts the results beside the paper's numbers, and
`report` writes the files. For each of the three tables, `overhead.yaml`, `parameters.yaml` and `gamma.yaml` list the
models of each scale (`smoke`, `small` and `paper`).
"""
