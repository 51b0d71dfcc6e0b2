"""`nixl-tiers doctor --gds DIR`: does GPUDirect Storage work in a directory, and does it bypass host memory there?"""
