#: name = "files without end"
#: right = ["ok", "error"]
#: lost = false

import os
os.mkdir('many')
os.chdir('many')
for i in range(3_000): os.mknod(str(i))
