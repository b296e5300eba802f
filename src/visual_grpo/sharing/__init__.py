"""One training by several processes: this one decides, the others draw samples and compute gradients of their share.

The process that was started, the first, has the trainer, the rewards, the checkpoints and the tracking, and knows of no
difference: its policies and its model are `SharedPolicy` and `SharedModel`, which pass whole groups on to the others.
So nothing has to be agreed on, an error anywhere is an error here, and a checkpoint does not depend on the number of
processes. Adapters go out after an update, gradients come back; both are small beside the model that each process has.
"""
