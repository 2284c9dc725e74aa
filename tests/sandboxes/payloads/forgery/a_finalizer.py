#: name = "a finalizer"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

class D:
    def __del__(self): os.write(3, frame({'id': 0, 'done': 0}))
D()
None
