"""
One short file for each question that comes after the ladder. *: it has a command.

    fairness              who goes first?
    tensor_parallel *     weights on several devices
    hardware              how long does a pass take on a GPU that is not here?
    calculated, arrivals  and a whole run of a stage? (simulate *: its command)
    overload              can that GPU keep up with a load?
    capacity *            how many GPUs can?
    published *           how far can all this be trusted?
    speculative *         guess several tokens, check them in one pass
    ahead *               plan the next pass while this one runs
    fork *                several answers to one prompt
"""
