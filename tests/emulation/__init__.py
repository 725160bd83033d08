"""What would need a GPU, in pure PyTorch and gloo: the surface of each engine that our adapters use, and its traps.

An emulation moves real rows between real processes. It is as strict as the real thing or stricter: what would be a
wrong number, a hang or a crash of the device there is an `EmulationError` or a NaN here.
"""
