#: name = "invalid UTF-8 and NUL"
#: right = ["ok"]
#: lost = false

import os; os.write(1, bytes(range(256)) * 9); os.write(2, bytes(999))
