#: name = "a recursion over the stack's end"
#: right = ["killed", "error", "oom"]
#: timeout_s = 30.0

import sys
sys.setrecursionlimit(10 ** 9)
class A:
    def __getattr__(self, name): return getattr(self, name + 'x')
class B(list):
    def __repr__(self): return repr(B())
repr(B())
