#: name = "a crash"
#: right = ["killed"]
#: lost = true
#: uses = ["frames"]

import ctypes; ctypes.string_at(0)
