// A client of etcd for benchmarks: "ENDPOINT,…". It reads lines with a kind of call, how many of them, and how many
// callers there are, and answers each with a line of JSON: the seconds that all took, and the milliseconds of each call
// if there is one caller.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

const (
	valueBytes      = 1700
	keys            = 100
	warmUp          = 50
	transactionPuts = 128 // the most that etcd takes by default
)

var value = strings.Repeat("x", valueBytes)

type put struct {
	key  string
	done chan error
}

// combine sends the puts that come while a transaction is under way in the next one. A key stands once in a transaction.
func combine(client *clientv3.Client, puts <-chan put) {
	var later []put
	for {
		waiting := later
		if len(waiting) == 0 {
			waiting = append(waiting, <-puts)
		}
		for more := true; more && len(waiting) < 2*transactionPuts; {
			select {
			case next := <-puts:
				waiting = append(waiting, next)
			default:
				more = false
			}
		}
		later = nil
		sent := map[string]put{}
		var operations []clientv3.Op
		for _, next := range waiting {
			if _, twice := sent[next.key]; twice || len(sent) == transactionPuts {
				later = append(later, next)
				continue
			}
			sent[next.key] = next
			operations = append(operations, clientv3.OpPut(next.key, value))
		}
		_, err := client.Txn(context.Background()).Then(operations...).Commit()
		for _, each := range sent {
			each.done <- err
		}
	}
}

func main() {
	client, err := clientv3.New(clientv3.Config{
		Endpoints:   strings.Split(os.Args[1], ","),
		DialTimeout: 10 * time.Second,
		Logger:      zap.NewNop(),
	})
	if err != nil {
		log.Fatal(err)
	}
	puts := make(chan put, 1024)
	go combine(client, puts)
	ctx := context.Background()
	calls := map[string]func(key string) error{
		"serializable": func(key string) error {
			_, err := client.Get(ctx, key, clientv3.WithSerializable())
			return err
		},
		"linearizable": func(key string) error {
			_, err := client.Get(ctx, key)
			return err
		},
		"write": func(key string) error {
			_, err := client.Put(ctx, key, value)
			return err
		},
		"combined write": func(key string) error {
			done := make(chan error, 1)
			puts <- put{key, done}
			return <-done
		},
	}
	for number := 0; number < keys; number++ {
		check(calls["write"](key(number)))
	}
	fmt.Println("{}")
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var order struct {
			Kind    string
			Count   int
			Callers int
		}
		check(json.Unmarshal(lines.Bytes(), &order))
		check(json.NewEncoder(os.Stdout).Encode(run(calls[order.Kind], order.Count, order.Callers)))
	}
}

type report struct {
	TookS float64   `json:"took_s"`
	MS    []float64 `json:"ms"`
}

func run(call func(string) error, count, callers int) report {
	for number := 0; number < warmUp && callers == 1; number++ {
		check(call(key(number)))
	}
	var next atomic.Int64
	var group sync.WaitGroup
	took := report{MS: []float64{}}
	began := time.Now()
	for caller := 0; caller < callers; caller++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for number := next.Add(1) - 1; number < int64(count); number = next.Add(1) - 1 {
				start := time.Now()
				check(call(key(int(number))))
				if callers == 1 {
					took.MS = append(took.MS, time.Since(start).Seconds()*1000)
				}
			}
		}()
	}
	group.Wait()
	took.TookS = time.Since(began).Seconds()
	return took
}

func key(number int) string { return fmt.Sprintf("k%d", number%keys) }

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
