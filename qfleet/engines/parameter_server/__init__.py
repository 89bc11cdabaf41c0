"""Gradients of many workers in, one vector of weights out: the parts of a parameter server.

layout       a flat vector in, its even slices out
shard        one slice, its optimiser and version; every push applied exactly once
admission    which gradients make an update, and who has to wait
schemes      what servers do with what is no gradient: elastic averaging, local SGD, ADMM
compression  vectors in, fewer bytes out, and back
clipping     a worker's whole gradient in, the same clipped or marked as bad out

Nothing here waits, sleeps or knows of processes: who calls, calls one method at a time.
"""
