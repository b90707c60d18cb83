"""Parameters, FLOPs and throughput of models; nothing is trained (`timm-ortho cost`).

`measure` counts and times, `tables` puts the results beside the paper's, `report` writes the files. `overhead.yaml`,
`parameters.yaml` and `gamma.yaml` list the models of each scale.
"""
