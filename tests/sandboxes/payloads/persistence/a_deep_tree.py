#: name = "a deep tree"
#: right = ["ok"]
#: lost = false

import os
for _ in range(1500):
    os.mkdir('d' * 60); os.chdir('d' * 60)
open('end', 'w')
