"""Between engine blocks and region rows: the copy plan, the CPU path, the CUDA path.

plan       where every byte stands, once for all paths
host       copies where blocks are host memory
cuda       copies where they are GPU memory; lane one direction of it, paths the ways over the bus,
           calibrate which of them a transfer takes
driver     the CUDA driver; kernels, nvrtc, tables what runs on the GPU; pinned, numa the region's memory
"""
