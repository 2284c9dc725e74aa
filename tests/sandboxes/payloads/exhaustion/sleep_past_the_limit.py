#: name = "sleep past the limit"
#: right = ["timeout"]
#: lost = false
#: timeout_s = 0.2

import time; time.sleep(60)
