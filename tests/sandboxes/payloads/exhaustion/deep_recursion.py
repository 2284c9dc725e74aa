#: name = "deep recursion"
#: right = ["error"]
#: lost = false

def f(): f()
f()
