"""The passes, one per file: each a function of a graph and the context of the compilation.

A pass changes the graph that it is given (Inductor hands its own graph over), keeps no state of its
own, and changes nothing when it runs a second time.
"""
