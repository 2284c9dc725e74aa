#: name = "asks whose answers nobody reads"
#: right = ["protocol", "timeout"]
#: lost = true
#: timeout_s = 2.0
#: functions = true
#: uses = ["frames"]

ask = frame({'id': call, 'ask': 1}, json.dumps(['f', ['x' * 100_000], {}]).encode())
while True:  # On a loaded machine, the time limit may come first.
    try: os.write(3, ask)
    except BaseException: pass
