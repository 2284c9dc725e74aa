#: name = "a flood of asks that nobody waits for"
#: right = ["protocol"]
#: lost = true
#: functions = true
#: uses = ["frames"]

ask = frame({'id': call, 'ask': 1}, b'["f", [], {}]')
threading.Thread(target=lambda: [os.read(3, 65536) for _ in iter(int, 1)], daemon=True).start()
while True: os.write(3, ask)
