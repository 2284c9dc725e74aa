#: name = "too many threads"
#: right = ["error"]
#: timeout_s = 30.0
#: kinds = ["bubblewrap", "docker", "runsc"]

import threading
go = threading.Event()
for _ in range(2000): threading.Thread(target=go.wait, daemon=True).start()
