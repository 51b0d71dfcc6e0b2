"""Copies between vLLM's blocks and region rows: the copy plan, the CPU copy, the CUDA copy.

plan       where every byte is, the same for all copies
host       copies where blocks are host memory
cuda       copies where they are GPU memory: `stream` one direction of it, `submit` its native thread, `strategies`
           how bytes cross the bus, `self_check` which strategy a group takes and whether it works here
driver     the CUDA driver; `kernels`, `nvrtc`, `device_tables` what runs on the GPU; `pinned`, `numa` the host memory
"""
