#: name = "an exception that hangs when it is shown"
#: right = ["timeout"]
#: timeout_s = 0.3
#: uses = ["frames"]

class E(Exception):
    def __str__(self):
        while True: time.sleep(0.1)
raise E()
