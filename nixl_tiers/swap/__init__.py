"""Between engine blocks and region rows: the copy plan, the CPU path, the CUDA path.

`plan` says where every byte stands, once for all paths; `host` copies where blocks are host memory;
`cuda` copies where they are GPU memory (needs torch; nothing else here does).
"""
