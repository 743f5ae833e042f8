// Sends and receives with go-amqp: types, a large message, settlement after the sender.
package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"reflect"
	"time"

	"github.com/Azure/go-amqp"
)

func check(err error) {
	if err != nil {
		fmt.Println("FAIL", err)
		os.Exit(1)
	}
}

func equal(expected, found any) {
	if !reflect.DeepEqual(expected, found) {
		fmt.Printf("FAIL expected %#v, found %#v\n", expected, found)
		os.Exit(1)
	}
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	conn, err := amqp.Dial(ctx, os.Args[1], &amqp.ConnOptions{SASLType: amqp.SASLTypePlain("ann", "correct horse")})
	check(err)
	session, err := conn.NewSession(ctx, nil)
	check(err)
	sender, err := session.NewSender(ctx, "queue:go", nil)
	check(err)
	mode := amqp.ReceiverSettleModeSecond
	receiver, err := session.NewReceiver(ctx, "queue:go", &amqp.ReceiverOptions{SettlementMode: &mode, Credit: 1})
	check(err)

	values := []any{
		uint32(4000000000), uint64(1<<63 + 5), int8(-3), float32(1.5),
		amqp.UUID{1, 2, 3}, time.UnixMilli(1700000000000).UTC(),
		map[any]any{"a": map[string]any{"b": []any{int64(1), "x"}}, int32(7): true},
		[]int32{1, 2, 3},
	}
	for _, value := range values {
		message := &amqp.Message{Value: value, Header: &amqp.MessageHeader{Durable: true}}
		check(sender.Send(ctx, message, nil))
		got, err := receiver.Receive(ctx, nil)
		check(err)
		equal(value, got.Value)
		check(receiver.AcceptMessage(ctx, got))
	}

	large := bytes.Repeat([]byte("muster"), 500000)
	check(sender.Send(ctx, amqp.NewMessage(large), nil))
	got, err := receiver.Receive(ctx, nil)
	check(err)
	equal(large, got.GetData())
	check(receiver.AcceptMessage(ctx, got))
	check(conn.Close())
	fmt.Println("all held")
}
