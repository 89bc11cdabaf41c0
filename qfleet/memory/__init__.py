"""Blocks in, batches out. ``ring`` stores, ``samplers`` choose, ``sizing`` refuses; ``rollout`` is
for learning without replay."""
