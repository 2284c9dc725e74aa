#: name = "an interrupt handler that answers"
#: right = ["timeout"]
#: following = ["ok", "protocol", "timeout"]
#: timeout_s = 0.3
#: uses = ["frames"]

import signal
signal.signal(2, lambda *_: os.write(3, frame({'id': call, 'done': 0})))
while True: time.sleep(1)
