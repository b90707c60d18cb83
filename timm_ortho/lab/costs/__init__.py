"""Measure parameters, FLOPs and throughput of models, without training (`timm-ortho cost`).

`measure` counts FLOPs and parameters and times the models. `cost_tables` puts the results beside the paper's numbers,
and `cost_report` writes the files. There are three tables of costs. `overhead.yaml`, `parameters.yaml` and `gamma.yaml`
list the models of each table at each scale (`smoke`, `small` and `paper`).
"""
