#: name = "a profile of the server that never returns"
#: right = ["timeout", "protocol"]
#: timeout_s = 0.3
#: uses = ["frames"]

def hang(*_):
    while True: time.sleep(1)
worker().running = True
sys.setprofile(hang)
