"""Memories of transitions: they take blocks and return batches.

ring         the replay buffer
samplers     uniform and prioritised sampling from the ring
sizing       the check that a replay buffer fits into memory before it is allocated
columns      the storage of the ring: RAM, device memory or memory-mapped files
compression  frames compressed with lz4
rollout      the newest rollout, for algorithms without replay
"""
