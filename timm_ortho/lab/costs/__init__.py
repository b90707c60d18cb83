"""Parameters, FLOPs and throughput of models; nothing is trained."""
