#: name = "a stopped parent"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker"]

import os; os.kill(os.getppid(), 19); os.kill(os.getppid(), 20)
