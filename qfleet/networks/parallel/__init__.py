"""One network over several ranks. docs/model-parallel.md explains it.

``split`` makes a rank's part of a network, with the initial values of ``deferred``. ``tensor``
replaces layers by parts of them, with the exchanges of ``collectives``; ``stages`` keeps some of
the layers, and computes their gradient by a ``schedule``. ``layout`` says which part of each
parameter a rank holds. Network classes do not know about ranks.
"""
