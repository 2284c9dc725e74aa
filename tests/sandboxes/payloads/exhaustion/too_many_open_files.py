#: name = "too many open files"
#: right = ["error"]
#: lost = false

x = [open('/dev/null') for _ in range(9999)]
