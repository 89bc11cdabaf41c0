"""The parameter server: many workers send gradients, servers hold one vector of weights.

layout       even slices of a flat vector
shard        one slice, its optimiser and version; every push applied exactly once
admission    which gradients form an update, and which workers have to wait
schemes      schemes without gradients in messages: elastic averaging, local SGD, ADMM
compression  vectors in fewer bytes, and back
clipping     clips a worker's whole gradient, or marks it as bad

These modules never wait and know nothing of processes; their methods are called one at a time.
"""
