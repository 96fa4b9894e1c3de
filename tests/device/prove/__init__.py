"""Leaves out each wait and each record_stream of whole trainings, one at a time.

The checked device must find each that is missing, or show that it was not needed: that others give
the same order, or that what came after it uses other memory. One for which it does neither is
missed.

    python -m tests.device.prove              every one of all trainings: forty minutes
    python -m tests.device.prove --every 10   a sample
    python -m tests.device.prove --only tied

Some trainings are of two processes (:mod:`tests.device.prove.two_processes`): one leaves it out,
and either may find it.
"""
