"""``megarl doctor``: is this machine, and are all machines of a run, ready to train?"""
