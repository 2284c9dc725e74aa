#: name = "an ask of text"
#: right = ["protocol"]
#: lost = true
#: functions = true
#: uses = ["frames"]

os.write(3, frame({'id': call, 'ask': 'f'}, b'[]'))
