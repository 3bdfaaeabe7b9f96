"""
One short file for each question that comes after the ladder. * : the file before it has a command

    fairness              who goes first?
    tensor_parallel *     weights on several devices
    hardware              how long does a pass take on any GPU?
    simulate *, arrivals  and all passes of a stage? All GPUs are calculated
    overload              can it keep up with so many requests a second?
    published *           how far is the calculation to be trusted?
    capacity *            how many GPUs?
    speculative *         guess several tokens, check them in one pass
    ahead *               plan the next pass while this one runs
    fork *                several answers to one prompt
"""
