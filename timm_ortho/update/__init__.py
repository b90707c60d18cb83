"""The residual update: its formula and gradients, the choice of a backend, and the Triton kernels."""
