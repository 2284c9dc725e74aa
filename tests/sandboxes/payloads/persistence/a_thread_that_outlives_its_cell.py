#: name = "a thread that outlives its cell"
#: right = ["ok"]
#: lost = false

import os, threading, time
def beat():
    while True: time.sleep(0.01); open('beat', 'w').write('x')
threading.Thread(target=beat).start()
