#: name = "a line without an end"
#: right = ["output_limit"]
#: lost = true

import sys
while True: sys.stdout.write('x' * 65536)
