"""Generators of training images, one per client (paper 002, Figures 5 and 6)."""

from fedsim.core.cuda_start import leave_cuda_alone

leave_cuda_alone()
