#: name = "an interrupt caught by a trace function"
#: right = ["timeout"]
#: timeout_s = 0.2

import sys, time
def trace(*_):
    try: time.sleep(60)
    except BaseException: pass
    return trace
def go():
    while True: time.sleep(0)
sys.settrace(trace)
go()
