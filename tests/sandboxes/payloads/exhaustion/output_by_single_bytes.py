#: name = "output by single bytes"
#: right = ["ok"]
#: lost = false

import os
for _ in range(50_000): os.write(1, b'x')
