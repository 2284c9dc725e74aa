#: name = "an exit hook"
#: right = ["ok"]
#: lost = false
#: uses = ["frames"]

import atexit
atexit.register(lambda: os.write(3, b'junk'))
raise SystemExit(0)
