// Layer normalisation of docs/integer_network.md: a row of int16 in, channel by channel, and out, channel by channel.
//
// The row is kept on chip and read twice. A multiplier of 32 x 32 bits serves the row's twelve products and N, a second one
// the gain. A row of C channels takes C cycles to load, C + 13 for variance and root, and C + 2 to leave; loading may overlap
// the last two.
module layer_norm #(
    parameter int CHANNELS = 192,
    parameter int OUT = 8,             // bits of the output: 8, 16 or 32
    // of the number of channels alone: I, i, K and j of the page
    parameter int INVERSE = 715827883,
    parameter int BITS = 35,
    parameter int ROOT = 619925131,
    parameter int SHIFT = 1,
    localparam int INDEX = CHANNELS > 1 ? $clog2(CHANNELS) : 1
) (
    input  logic                  clk,
    input  logic                  reset,
    input  logic        [46:0]    epsilon,     // E
    input  logic        [4:0]     shift,       // n, 1 to 29
    input  logic                  in_valid,    // a channel is taken in every cycle in which in_ready is set as well
    output logic                  in_ready,
    input  logic signed [15:0]    h,
    output logic   [INDEX-1:0]    channel,     // whose gain and offset are wanted, in the same cycle
    input  logic signed [31:0]    gain,        // G of it
    input  logic signed [31:0]    offset,      // B of it
    output logic                  out_valid,
    output logic signed [31:0]    normalised,  // N of the channel that leaves
    output logic signed [OUT-1:0] y
);
    typedef enum logic [2:0] {LOAD, MEAN, VARIANCE, ALIGN, START, NEWTON, FACTOR, LEAVE} state_t;
    state_t state;

    logic signed [15:0] row[0:CHANNELS-1];
    logic [INDEX-1:0] count;
    logic [1:0] part;                  // of a Newton step
    logic [1:0] turn;
    logic signed [31:0] sum;           // S, 28 bits
    logic signed [18:0] mean4;         // m
    logic signed [47:0] variance;      // V
    logic signed [31:0] v, x, partial, factor;
    logic signed [5:0] left;           // l

    // V has k times 2 bits more than v; k from -14 to 9
    logic [5:0] length;
    logic signed [6:0] k;
    logic [47:0] aligned;
    logic [5:0] up, down;
    always_comb begin
        length = 6'd0;
        for (int i = 0; i < 48; i++) if (variance[i]) length = 6'(i + 1);
    end
    assign k = ($signed({1'b0, length}) - 7'sd29) >>> 1;
    assign up = {-k[4:0], 1'b0};
    assign down = {k[4:0], 1'b0};
    assign aligned = k < 0 ? variance << up : variance >> down;

    // the shared multiplier: (a b + 2^(n - 1)) >> n
    logic signed [31:0] a, b, product;
    logic [5:0] n;
    logic signed [63:0] wide;
    assign wide = a * b + (64'sd1 <<< (n - 6'd1));
    assign product = 32'(wide >>> n);

    logic signed [15:0] element;
    logic signed [18:0] deviation4;    // 4 h - m
    logic signed [37:0] square;
    logic signed [31:0] d, scaled;     // C h - S, and d 2^l
    assign element = row[count];
    assign deviation4 = 19'($signed({element, 2'b00})) - mean4;
    assign square = deviation4 * deviation4;
    assign d = 32'(element) * CHANNELS - sum;
    // ~left is -left - 1
    assign scaled = left >= 0 ? d <<< left : ((d >>> ~left) + 32'sd1) >>> 1;

    always_comb begin
        a = x; b = x; n = 6'd30;
        case (state)
            MEAN: begin a = sum; b = INVERSE; n = 6'(BITS); end
            START: begin a = v; b = 32'sd654339257; end
            NEWTON: case (part)
                2'd0: ;
                2'd1: begin a = partial; b = v; end
                default: begin b = partial; n = 6'd29; end
            endcase
            FACTOR: b = ROOT;
            default: begin a = scaled; b = factor; n = 6'd32; end
        endcase
    end

    // the second stage of what leaves: gain, offset, rounding, saturation
    logic more, leaving;
    logic signed [31:0] by_row, gain1, offset1, gained, biased;
    logic signed [OUT-1:0] fitted;
    mul_round #(.SHIFT(28)) by_gain (.a(by_row), .b(gain1), .y(gained));
    assign biased = gained + offset1;
    logic signed [32:0] rounded;
    assign rounded = ((33'(biased) >>> (shift - 5'd1)) + 33'sd1) >>> 1;
    saturate #(.IN(33), .OUT(OUT)) fit (.x(rounded), .y(fitted));

    assign in_ready = state == LOAD;
    assign channel = count;
    assign more = count != INDEX'(CHANNELS - 1);

    always_ff @(posedge clk) begin
        leaving <= 1'b0;
        out_valid <= leaving;
        normalised <= by_row;
        y <= fitted;
        case (state)
            LOAD: if (in_valid) begin
                row[count] <= h;
                sum <= (count == '0 ? 32'sd0 : sum) + 32'(h);
                count <= more ? count + 1'b1 : '0;
                if (!more) state <= MEAN;
            end
            MEAN: begin
                mean4 <= product[18:0];
                variance <= {1'b0, epsilon};
                state <= VARIANCE;
            end
            VARIANCE: begin
                variance <= variance + 48'(square);
                count <= more ? count + 1'b1 : '0;
                if (!more) state <= ALIGN;
            end
            ALIGN: begin
                v <= aligned[47:28] == 20'd0 ? 32'sd268435456 : aligned[31:0];
                left <= 6'(7'sd8 - k - 7'(SHIFT));
                state <= START;
            end
            START: begin
                x <= 32'sd1145106637 - product;
                {part, turn} <= 4'd0;
                state <= NEWTON;
            end
            NEWTON: begin
                part <= part == 2'd2 ? 2'd0 : part + 2'd1;
                if (part == 2'd0) partial <= product;
                if (part == 2'd1) partial <= 32'sd268435456 - product;
                if (part == 2'd2) begin
                    x <= x + product;
                    turn <= turn + 2'd1;
                    if (turn == 2'd2) state <= FACTOR;
                end
            end
            FACTOR: begin
                factor <= product;
                state <= LEAVE;
            end
            default: begin  // LEAVE
                by_row <= product;
                {gain1, offset1} <= {gain, offset};
                leaving <= 1'b1;
                count <= more ? count + 1'b1 : '0;
                if (!more) state <= LOAD;
            end
        endcase
        if (reset) begin
            state <= LOAD;
            count <= '0;
            leaving <= 1'b0;
            out_valid <= 1'b0;
        end
    end
endmodule
