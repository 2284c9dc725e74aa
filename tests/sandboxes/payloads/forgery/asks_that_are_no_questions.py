#: name = "asks that are no questions"
#: right = ["ok"]
#: lost = false
#: functions = true
#: uses = ["frames"]

said = []
for body in (b'', b'{}', b'[]', b'[1, 2, 3]',
             b'["f", {}, {}]', b'["f", [], []]', b'["__class__", [], {}]',
             b'["f", [], {}, 1]', b'[' * 100_000, b'1' * 9_000, b'\xff', b'NaN', b'["f", [NaN], {}]'):
    os.write(3, frame({'id': call, 'ask': 7}, body))
    size = struct.unpack('>I', os.read(3, 4))[0]
    said.append(os.read(3, json.loads(os.read(3, size))['body']))
print(len(said), sum(b'error' in s for s in said))
