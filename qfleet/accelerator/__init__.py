"""Work for an accelerator, recorded once and replayed: the parts that know streams and graphs.

graphs     capture a function's kernels, replay them with one launch
inference  the actor's side: stacks live on the device, only newest frames cross
tuning     which precision, and compiled or not, by a short measurement that is kept on disk
"""
