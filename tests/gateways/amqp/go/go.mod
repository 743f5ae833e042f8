module muster/amqp

go 1.21

require github.com/Azure/go-amqp v1.3.0
