#: name = "no memory of the host in the garbage"
#: right = ["ok"]
#: lost = false
#: uses = ["frames"]

import gc
print([o for o in gc.get_objects() if type(o).__name__ in ('Supervisor', 'Child', 'Call')])
