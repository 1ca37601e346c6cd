"""The methods of other training stacks, re-expressed in plain torch, and ours. ``registry.METHODS`` lists them.

Each is written anew from what the upstream code does at the commit named in its module: the dtype of every stage, the
passes over tensors of the size of the logits, what backward keeps, the collectives. Where upstream has a fused kernel
for a step, the cheapest plain form of the same step stands in, so that a peer is never charged for eager overhead
that its users do not pay. The numbers of a CPU run say nothing about GPU kernels.
"""
