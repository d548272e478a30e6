import com.fasterxml.jackson.databind.ObjectMapper;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Collections;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.generic.GenericRecordBuilder;
import org.apache.avro.io.BinaryDecoder;
import org.apache.avro.io.DecoderFactory;
import org.apache.avro.message.BinaryMessageDecoder;
import org.apache.avro.message.BinaryMessageEncoder;
import org.apache.avro.message.SchemaStore;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.PartitionInfo;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * A guest of a run: asks for samples of its own prompts and prints them as JSON, one line for each.
 *
 * <p>It knows the names of topics, events and fields. The schemas it learns from the log.
 */
public final class Guest {
  /** Seats from here on belong to guests: their prompt groups are generated and scored, never trained. */
  private static final int FIRST_GUEST_SEAT = 1_000_000;

  private static final Duration POLL = Duration.ofMillis(500);

  /** What is printed for each sample of a record, by the record's event. */
  private static final Map<String, String> ONE_SAMPLE =
      Map.of("SamplesRolledOut", "SampleRolledOut", "SamplesScored", "SampleScored");

  /** Fields of a record that belong to the keys of its samples. */
  private static final Set<String> OF_KEY = Set.of("sample_index", "min_policy_version", "max_policy_version");

  /** The list that the samples of a record share; every other one has an element for each of them. */
  private static final String SHARED_LIST = "messages";

  /** The array that has a number for each sample; every other one lies along their tokens. */
  private static final String NUMBERS = "seconds";

  private final String bootstrapServers;
  private final String prefix;
  private final Instant deadline;
  private final SchemaStore.Cache store = new SchemaStore.Cache();
  private final Map<String, Schema> schemas = new HashMap<>();
  private final Map<Integer, Schema> registered = new HashMap<>();
  private final ObjectMapper json = new ObjectMapper();

  private Guest(String bootstrapServers, String runId, Duration patience) {
    this.bootstrapServers = bootstrapServers;
    this.prefix = "relax." + runId + ".";
    this.deadline = Instant.now().plus(patience);
  }

  /** Arguments: bootstrap servers, run id, seconds to wait at most, samples of each prompt, prompts. */
  public static void main(String[] arguments) throws Exception {
    Guest guest = new Guest(arguments[0], arguments[1], Duration.ofSeconds(Long.parseLong(arguments[2])));
    List<String> prompts = List.of(arguments).subList(4, arguments.length);
    guest.learnSchemas(Set.of("PromptGroupIssued", "PolicyVersionPublished", "SamplesRolledOut", "SamplesScored",
        "PromptGroupEnded"));
    long version = guest.newestVersion();
    int samplesPerPrompt = Integer.parseInt(arguments[3]);
    Set<String> ids = guest.issue(prompts, version, samplesPerPrompt);
    guest.await(ids, samplesPerPrompt);
  }

  /** Reads control.schemas until it has every schema that is needed: writers publish theirs before their first record. */
  private void learnSchemas(Set<String> needed) {
    try (KafkaConsumer<byte[], byte[]> consumer = reader("control.schemas")) {
      while (!schemas.keySet().containsAll(needed)) {
        for (ConsumerRecord<byte[], byte[]> record : poll(consumer, "the schemas")) {
          Schema schema = new Schema.Parser().parse(new String(record.value(), StandardCharsets.UTF_8));
          store.addSchema(schema);
          if (schema.getObjectProp("registry_schema_ids") instanceof List<?> ids) {
            ids.forEach(id -> registered.put(((Number) id).intValue(), schema));
          }
          schemas.put(schema.getName(), schema);
        }
      }
    }
  }

  /** Returns the newest policy version there is, waiting for the first. */
  private long newestVersion() throws Exception {
    try (KafkaConsumer<byte[], byte[]> consumer = reader("control.policy-versions")) {
      long version = -1;
      while (version < 0) {
        for (ConsumerRecord<byte[], byte[]> record : poll(consumer, "a policy version")) {
          version = Math.max(version, (long) decode("PolicyVersionPublished", record.value()).get("policy_version"));
        }
      }
      return version;
    }
  }

  /** Writes a prompt group for each prompt and returns their ids. */
  private Set<String> issue(List<String> prompts, long version, int samplesPerPrompt) throws Exception {
    Set<String> ids = new LinkedHashSet<>();
    Map<String, Object> settings = client(Map.of("acks", "all", "enable.idempotence", true));
    try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
      BinaryMessageEncoder<GenericRecord> encoder = new BinaryMessageEncoder<>(GenericData.get(), schemas.get("PromptGroupIssued"));
      for (String prompt : prompts) {
        int seat = FIRST_GUEST_SEAT + ids.size();
        String id = String.format("%06d-%04d-0", version, seat);
        byte[] value = encoder.encode(promptGroup(id, seat, version, samplesPerPrompt, prompt)).array();
        producer.send(new ProducerRecord<>(prefix + "prompt.groups", id.getBytes(StandardCharsets.UTF_8), value)).get();
        ids.add(id);
      }
    }
    return ids;
  }

  private GenericRecord promptGroup(String id, int seat, long version, int samplesPerPrompt, String prompt) {
    Schema schema = schemas.get("PromptGroupIssued");
    Schema message = schema.getField("messages").schema().getElementType();
    Schema part = message.getField("parts").schema().getElementType();
    GenericRecord text = new GenericRecordBuilder(part)
        .set("kind", new GenericData.EnumSymbol(part.getField("kind").schema(), "text"))
        .set("text", prompt)
        .build();
    return new GenericRecordBuilder(schema)
        .set("prompt_group_id", id)
        .set("train_step", version)
        .set("group_index", seat)
        .set("attempt", 0)
        .set("row", -1L)
        .set("required_policy_version", version)
        .set("samples_per_prompt", samplesPerPrompt)
        .set("messages", List.of(new GenericRecordBuilder(message).set("role", "user").set("parts", List.of(text)).build()))
        .set("metadata", "{\"asked_by\": \"guest\"}")
        .set("seed", (long) seat)
        .set("issued_at", Instant.now().toEpochMilli() * 1000)
        .build();
  }

  /** Prints the samples, scores and ends of our prompt groups until each has ended. */
  private void await(Set<String> ids, int samplesPerPrompt) throws Exception {
    Set<String> open = new LinkedHashSet<>(ids);
    Set<String> sampled = new LinkedHashSet<>();
    try (KafkaConsumer<byte[], byte[]> consumer = reader("rollout.samples", "reward.scores", "control.prompt-group-outcomes")) {
      while (!open.isEmpty() || sampled.size() < ids.size() * samplesPerPrompt) {
        for (ConsumerRecord<byte[], byte[]> record : poll(consumer, "samples of " + open)) {
          String kind = writer(record.value()).getName();
          GenericRecord event = decode(kind, record.value());
          GenericRecord key = event.hasField("key") ? (GenericRecord) event.get("key") : event;
          String id = key.get("prompt_group_id").toString();
          if (!ids.contains(id)) {
            continue;
          }
          List<Map<String, Object>> lines = ONE_SAMPLE.containsKey(kind) ? samples(kind, event) : List.of(line(kind, event));
          for (Map<String, Object> line : lines) {
            System.out.println(json.writeValueAsString(line));
            if (line.get("event").equals("SampleRolledOut")) {
              sampled.add(((Map<?, ?>) line.get("key")).get("sample_id").toString());
            }
          }
          if (kind.equals("PromptGroupEnded")) {
            open.remove(id);
          }
        }
      }
    }
  }

  /** Takes a record of samples apart, into what each sample has. */
  private List<Map<String, Object>> samples(String kind, GenericRecord columns) {
    List<Map<String, Object>> samples = new ArrayList<>();
    int count = ((Collection<?>) columns.get("sample_index")).size();
    int begin = 0;
    for (int index = 0; index < count; index++) {
      int length = columns.hasField("lengths") ? numbers((GenericRecord) columns.get("lengths")).get(index).intValue() : 0;
      Map<String, Object> sample = new LinkedHashMap<>();
      Map<String, Object> key = line("SampleKey", (GenericRecord) columns.get("key"));
      sample.put("event", ONE_SAMPLE.get(kind));
      for (Schema.Field field : columns.getSchema().getFields()) {
        if (!Set.of("key", "lengths").contains(field.name())) {
          (OF_KEY.contains(field.name()) ? key : sample).put(field.name(), valueOf(field, columns, index, begin, begin + length));
        }
      }
      key.put("sample_id", key.get("prompt_group_id") + "/" + key.get("sample_index"));
      sample.put("key", key);
      samples.add(sample);
      begin += length;
    }
    return samples;
  }

  /** Returns a field of one sample: from begin to end in an array along the tokens, at index in a list or in an array of numbers. */
  private Object valueOf(Schema.Field field, GenericRecord columns, int index, int begin, int end) {
    Object value = columns.get(field.name());
    if (field.name().equals(NUMBERS)) {
      return value == null ? 0.0 : numbers((GenericRecord) value).get(index);
    }
    if (value instanceof GenericRecord tensor && tensor.getSchema().getName().equals("PackedTensor")) {
      return numbers(tensor).subList(begin, end);
    }
    if (!(value instanceof List<?> values) || field.name().equals(SHARED_LIST)) {
      return plain(value);
    }
    return values.isEmpty() ? nothing(field.schema().getElementType()) : elementAt(values, index);
  }

  /** Returns what all samples have where a list has no elements: the empty value of its type. */
  private static Object nothing(Schema type) {
    return switch (type.getType()) {
      case ARRAY -> List.of();
      case MAP -> Map.of();
      case STRING -> "";
      default -> null;
    };
  }

  private Object elementAt(Object values, int index) {
    return plain(((List<?>) values).get(index));
  }

  private Map<String, Object> line(String kind, GenericRecord event) {
    Map<String, Object> line = new LinkedHashMap<>();
    line.put("event", kind);
    for (Schema.Field field : event.getSchema().getFields()) {
      line.put(field.name(), plain(event.get(field.pos())));
    }
    return line;
  }

  private Object plain(Object value) {
    if (value instanceof GenericRecord record) {
      return record.getSchema().getName().equals("PackedTensor") ? numbers(record) : line(record.getSchema().getName(), record);
    }
    if (value instanceof Collection<?> items) {
      return items.stream().map(this::plain).toList();
    }
    if (value instanceof Map<?, ?> entries) {
      Map<String, Object> plain = new LinkedHashMap<>();
      entries.forEach((key, item) -> plain.put(key.toString(), plain(item)));
      return plain;
    }
    return value == null || value instanceof Number || value instanceof Boolean ? value : value.toString();
  }

  /** Reads a packed tensor: little-endian elements in C order, as many as the shape says, or one of each run. */
  private static List<Number> numbers(GenericRecord tensor) {
    ByteBuffer data = ((ByteBuffer) tensor.get("data")).duplicate().order(ByteOrder.LITTLE_ENDIAN);
    String dtype = tensor.get("dtype").toString();
    long count = 1;
    for (Object length : (Collection<?>) tensor.get("shape")) {
      count *= (long) length;
    }
    ByteBuffer runs = tensor.getSchema().getField("run_lengths") == null ? null : (ByteBuffer) tensor.get("run_lengths");
    if (runs != null) {
      runs = runs.duplicate().order(ByteOrder.LITTLE_ENDIAN);
      count = runs.remaining() / 4;
    }
    List<Number> numbers = new ArrayList<>();
    for (long index = 0; index < count; index++) {
      numbers.add(switch (dtype) {
        case "|u1" -> Byte.toUnsignedInt(data.get());
        case "<i4" -> data.getInt();
        case "<f4" -> data.getFloat();
        case "<f8" -> data.getDouble();
        default -> throw new IllegalArgumentException("a tensor of " + dtype + " is not expected here");
      });
    }
    if (data.hasRemaining()) {
      throw new IllegalArgumentException(data.remaining() + " bytes are left behind a tensor of " + count + " " + dtype);
    }
    if (runs == null) {
      return numbers;
    }
    List<Number> whole = new ArrayList<>();
    for (Number number : numbers) {
      whole.addAll(Collections.nCopies(runs.getInt(), number));
    }
    return whole;
  }

  /** Returns the schema that a record names, in either framing: 00 and a registry's schema id, or C3 01 and a fingerprint. */
  private Schema writer(byte[] value) {
    return value[0] == 0
        ? registered.get(ByteBuffer.wrap(value, 1, 4).getInt())
        : store.findByFingerprint(ByteBuffer.wrap(value, 2, 8).order(ByteOrder.LITTLE_ENDIAN).getLong());
  }

  private GenericRecord decode(String kind, byte[] value) throws Exception {
    if (value[0] == 0) {
      BinaryDecoder body = DecoderFactory.get().binaryDecoder(value, 5, value.length - 5, null);
      return new GenericDatumReader<GenericRecord>(writer(value), schemas.get(kind)).read(null, body);
    }
    return new BinaryMessageDecoder<GenericRecord>(GenericData.get(), schemas.get(kind), store).decode(value);
  }

  private Iterable<ConsumerRecord<byte[], byte[]>> poll(KafkaConsumer<byte[], byte[]> consumer, String what) {
    if (Instant.now().isAfter(deadline)) {
      throw new IllegalStateException("gave up waiting for " + what);
    }
    return consumer.poll(POLL);
  }

  /** Opens a reader of whole topics, from their beginning. */
  private KafkaConsumer<byte[], byte[]> reader(String... entities) {
    Map<String, Object> settings = client(Map.of("isolation.level", "read_committed", "enable.auto.commit", false));
    KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    List<TopicPartition> partitions = new ArrayList<>();
    for (String entity : entities) {
      for (PartitionInfo found : consumer.partitionsFor(prefix + entity)) {
        partitions.add(new TopicPartition(found.topic(), found.partition()));
      }
    }
    consumer.assign(partitions);
    consumer.seekToBeginning(partitions);
    return consumer;
  }

  private Map<String, Object> client(Map<String, Object> more) {
    Map<String, Object> settings = new HashMap<>(more);
    settings.put("bootstrap.servers", bootstrapServers);
    return settings;
  }
}
