#: name = "a wide tree that is locked"
#: right = ["ok"]
#: lost = false

import os
for i in range(150):
    for j in range(10): os.makedirs(f'{i}/{j}/x/y/z')
    os.chmod(str(i), 0)
