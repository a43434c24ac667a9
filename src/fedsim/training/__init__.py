"""Clients, their models, optimizers and labels; and the server."""

from fedsim.core.cuda_start import leave_cuda_alone

leave_cuda_alone()
